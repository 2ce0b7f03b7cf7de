"""Carrying out a plan, and telling it."""
