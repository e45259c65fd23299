"""Every where with every what: the grid that none of the papers has.

    grid = fill(Matrix(data, where=("attention:dinov2-s14-reg", "everything"), what=("crop-probe:dinov2-l14-reg",)))

`words` are what a user says; a `where` shows something of every picture, in one of several `ways`; `whats` answer from
it; `cells` are what comes of one pair, and the `grid` is all of them.
"""
