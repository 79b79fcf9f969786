"""The part of the study that is about volume: dry runs of the paper's models at the paper's scales."""
