"""What a training job must communicate, told from the job alone: no event is seen, no framework is imported.

    predict(job)                 a Prediction: the calls at start-up, and those of each step
    described                    the same jobs, told from configurations
    closed_forms, further_forms  the formulas of the literature, as they stand

A scheme (`schemes`) makes the prediction from rules, one small function each. A rule mirrors one function of a
framework and names it; `rules.RULES` lists them all with the versions whose sources they were written from.
"""

from .configs import job_rows as described
from .expected_calls import ExpectedCall, Prediction
from .job import NotPredictedError
from .schemes import predict

__all__ = ["ExpectedCall", "NotPredictedError", "Prediction", "described", "predict"]
