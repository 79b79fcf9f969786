"""What a training is going to communicate, told from its configuration files and the number of ranks: nothing runs."""

from __future__ import annotations

from commtrace.theory.configs.job_plan import JobPlan, PlanError, PlanOptions, plan_job

from .predicted_volumes import Forecast, forecast

__all__ = ["Forecast", "JobPlan", "PlanError", "PlanOptions", "forecast", "plan_job"]
