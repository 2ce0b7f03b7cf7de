"""One file per child object, each with `build(ctx) -> object | None`; None means that it must not exist."""
