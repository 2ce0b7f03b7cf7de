"""From what is wanted and what is there to what to do and what to say. Pure."""
