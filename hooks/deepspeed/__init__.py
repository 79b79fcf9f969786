"""Hooks of DeepSpeed.

hook                        steps, micro-batches and phases of engines; installation
engine_job, pipeline_job    the job row of an engine
roles_by_registry           parallel dimensions of groups
purpose_sources             purposes of calls
expert_layers               mixtures of experts: purposes, and tokens of each step
"""
