"""From tokens to training samples: the token store, and samplers whose every batch is a pure
function of its number.
"""
