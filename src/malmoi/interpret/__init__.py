"""Looking inside a model: interventions, importance, attributions, attention, lens, probes."""
