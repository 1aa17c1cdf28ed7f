"""Training samples: the token store, and samplers that are pure functions of the batch number."""
