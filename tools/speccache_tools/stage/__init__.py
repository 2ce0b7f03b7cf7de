"""Puts SpecCache onto a cluster and looks at what becomes of it, with kubectl and helm."""
