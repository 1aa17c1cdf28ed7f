"""The demo: the main job from end to end on built-in text: the plan and its story → the run →
the page.
"""
