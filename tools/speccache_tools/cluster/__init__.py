"""A real Kubernetes cluster of one node on this machine, made from package registries only.

The standard library is all that it needs, so that a machine without the project's Python environment can run it too.
"""
