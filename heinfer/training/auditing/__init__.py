"""An empirical lower bound on the epsilon of a recipe, from one training run with canaries.

    bound      from right and wrong guesses to a lower bound on epsilon
    canaries   made-up records with gradients of their own, in the real private loop
    power      what an audit of this size would notice
    controls   three broken trainers that an audit must catch
    audit      all of it together

Nothing here is imported by training.
"""
