"""The API of SpecCache: the resource, its rules, its sizes, the wire document. Pure: no cluster, no torch, no I/O."""
