"""A real Kubernetes cluster of one node on this machine, from package registries only. Needs the standard library alone."""
