"""One file per child object, each with `build(ctx)`: an object, ABSENT or UNKNOWN (answer.py). The table lists them."""
