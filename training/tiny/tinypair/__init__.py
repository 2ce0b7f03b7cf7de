"""Trains `builtin://tiny`: a small Llama target and its EAGLE-3 head, and measures what a lost draft KV costs."""
