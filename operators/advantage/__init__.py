"""Advantages: credit for each row, from the rewards of its group, of all rows, or of its steps.

A reward that is NULL, NaN or infinite was not computed: the row is left out of all statistics and
gets no advantage. Where all rewards that are compared are equal, or there is only one, the
advantage is 0, unless a formula says otherwise. Standard deviations are those of a sample (divisor
n - 1), as in the view `groups`. The result is the same to the last bit for any order of rows.

Generalized advantage estimation (arXiv:1506.02438) is not here: it needs a critic's value of each
token, which only a trainer has.
"""
