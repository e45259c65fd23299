"""Every selector (where) with every predictor (what), evaluated on the same images.

    grid = fill(Matrix(data, where=("attention:dinov2-s14-reg", "everything"), what=("crop-probe:dinov2-l14-reg",)))

`words` parses the specs of a user (KIND:ARGUMENT); `wheres` choose what is visible, in one of several `ways`; `whats`
predict from it; a cell holds the result of one pair, and the grid all of them.
"""
