"""Events become keys, and a key becomes one pass at a time."""
