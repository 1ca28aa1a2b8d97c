"""`strata calibrate`: a model's layers one after the other over a text, and what their matrices read."""
