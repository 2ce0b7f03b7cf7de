"""Package data: models that ship with the runtime. Paths are resolved by `speccache_runtime.config`."""
