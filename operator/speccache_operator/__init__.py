"""The SpecCache operator: turns one `SpecCacheDeployment` into the objects that serve it, and says how that goes."""
