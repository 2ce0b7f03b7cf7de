"""A real cluster on one machine (`cluster`), ways to use any cluster with SpecCache on it (`stage`), and the demo.

For tests, for the demo and for people; part of the development install only, of no wheel and of no image.
"""
