"""Where a model learnt something: a run's own training text, indexed and searched."""
