"""The process: its settings, its HTTP port, its Lease."""
