"""Tables and figures of the papers, done again: ours beside theirs. One file a study, listed in
`studies.py`.
"""
