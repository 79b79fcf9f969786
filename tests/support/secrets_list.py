"""Forms of secrets in the environment, for tests that none of them reaches a log. None of them was ever valid."""

from __future__ import annotations

from typing import Final

SECRETS: Final[dict[str, str]] = {
    # where the name shows it
    "NCCL_TOKEN": "hunter2",
    "UCX_AUTH_KEY": "correct-horse",
    "FI_OPX_PASSWORD": "battery",
    "GLOO_STORE_PASSWD": "staple",
    "OMPI_MCA_plm_rsh_password": "letmein",
    "MPICH_SECRET": "swordfish",
    "TORCH_NCCL_CREDENTIALS": "opensesame",
    "NCCL_API_KEY": "qwerty",
    "RCCL_PRIVATE_PATH": "trustno1",
    "OMP_LICENSE": "dragon",
    "NCCL_PWD": "monkey",
    "UCX_COOKIE": "iloveyou",
    "FI_CERT": "shadow",
    "GLOO_WEBHOOK": "sunshine",
    "NCCL_SALT": "princess",
    # variables that are not recorded at all
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "HF_HOME_TOKEN": "hf_plainword",
    "WANDB_KEY": "0123456789abcdef0123456789abcdef01234567",
    "DATABASE_URL": "postgres-admin-pass",
    "SSH_AUTH_SOCK_NAME": "agent-socket-name",
    # where the value shows it
    "NCCL_FIRST": "AKIAIOSFODNN7EXAMPLE",
    "NCCL_SECOND": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "NCCL_THIRD": "github_pat_11ABCDEFG0aBcDeFgHiJkL",
    "UCX_FOURTH": "glpat-ABCdef123456",
    "UCX_FIFTH": "hf_QwErTyUiOpAsDfGh",
    "UCX_SIXTH": "sk-proj-abcdef",
    "FI_SEVENTH": "xoxb-17653672481-19874698323",
    "FI_EIGHTH": "AIzaSyA1234567890abcdef",
    "FI_NINTH": "ya29.a0AfH6SMB",
    "GLOO_TENTH": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
    "GLOO_ELEVENTH": "redis://admin:openup@10.0.0.1:6379/0",
    "GLOO_TWELFTH": "https://storage.example.com/blob?sig=abcd",
    "OMPI_MCA_thirteenth": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "OMPI_MCA_fourteenth": "user=me,password=plain",
    "OMPI_MCA_fifteenth": "Bearer abcdefgh",
    "MPICH_SIXTEENTH": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "MPICH_SEVENTEENTH": "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "MPICH_EIGHTEENTH": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
    "OMP_NINETEENTH": "P@ssw0rd!x",
    "OMP_TWENTIETH": "token: abcdefg",
    "TORCH_NCCL_TWENTYFIRST": "aGVsbG8gd29ybGQgdGhpcyBpcyBh",
    "NCCL_TWENTYSECOND": "npm_abcdefghijk",
    "DS_TWENTYTHIRD": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5",
    "KMP_TWENTYFOURTH": "nvapi-abcdefgh",
}
"""Values by variable."""
