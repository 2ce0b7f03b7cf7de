"""One look at the cluster, as a frozen value."""
