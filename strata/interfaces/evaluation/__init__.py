"""`strata eval`: how well models foresee a text, and what a cheaper one of them lost."""
