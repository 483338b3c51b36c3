"""SGLang servers as an engine, with weights that change while they run."""
