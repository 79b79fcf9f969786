"""Hooks of DeepSpeed.

hook                        steps, micro-batches and phases of engines; installation
engine_job, pipeline_job    the job row of an engine
roles_by_registry           parallel dimensions of groups
purpose_sources             purposes of calls
sequence_purposes           purposes of calls of sequence parallelism, and of losses over a sharded vocabulary
parameter_states            ZeRO-3: what gathers and uses parameters besides passes
expert_layers               mixtures of experts: purposes, and tokens of each step
"""
