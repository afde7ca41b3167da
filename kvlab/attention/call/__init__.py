"""The life of a call, the same for all operations: check, arrange, plan, launch, results."""
