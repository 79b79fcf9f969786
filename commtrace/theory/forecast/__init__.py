"""Forecasts: what a job will communicate, from its configuration files and number of ranks alone.

    from commtrace.theory.forecast import PlanOptions, forecast
    job = forecast(["13B"], 64, PlanOptions(zero_stage=3))

`predicted_volumes` has the forecast and its volumes as rows, `predicted_times` its times on a network, `text_report`
the text of `commtrace theory`.
"""

from __future__ import annotations

from commtrace.theory.configs.job_plan import plan_job
from commtrace.theory.configs.plan_options import JobPlan, PlanError, PlanOptions

from .predicted_volumes import Forecast, forecast

__all__ = ["Forecast", "JobPlan", "PlanError", "PlanOptions", "forecast", "plan_job"]
