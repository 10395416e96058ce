"""SGLang as the generation engine: servers that rondo starts or finds, behind the `Engine` protocol."""
