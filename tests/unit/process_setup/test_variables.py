"""Environment variables in the log: settings of communication libraries, and no secrets."""

from __future__ import annotations

import pytest
from secrets_list import SECRETS

from commtrace.process_setup.variables import may_be_secret, read_transport_variables, read_variables

ORDINARY = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "^LL128",
    "NCCL_SOCKET_IFNAME": "=eth0,enp0s31f6:bond0",
    "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1",
    "NCCL_TOPO_FILE": "/opt/nccl/topo_p5.48xlarge.xml",
    "NCCL_TUNER_PLUGIN": "/usr/local/gib/lib64/libnccl-tuner.so",
    "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_TLS": "rc_x,ud_x,dc_mlx5,self,sm,cuda_copy,cuda_ipc,gdr_copy",
    "UCX_IB_PKEY": "0x8001",
    "UCX_NET_DEVICES": "mlx5_0:1",
    "FI_PROVIDER": "efa;ofi_rxm",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "OMPI_MCA_btl": "^openib,uct",
    "OMPI_MCA_btl_tcp_if_include": "10.0.0.0/8",
    "MPIR_CVAR_CH4_OFI_MULTI_NIC_STRIPING_THRESHOLD": "1048576",
    "OMP_NUM_THREADS": "4,2",
    "OMP_PLACES": "{0:4},{4:4}",
    "OMP_PROC_BIND": "close",
    "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-8932f937-d72c-4106-c12f-20bd9faed9f7",
    "TORCHELASTIC_RUN_ID": "c4e2dc78-b744-43d7-a6b4-3586a8ff1499",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True",
    "KMP_AFFINITY": "granularity=fine,compact,1,0",
}


def test_values_of_ordinary_settings_are_kept() -> None:
    assert read_variables(ORDINARY) == dict(sorted(ORDINARY.items()))


@pytest.mark.parametrize("name", SECRETS)
def test_no_form_of_a_secret_is_kept(name: str) -> None:
    kept = read_variables({"RANK": "0", name: SECRETS[name]})
    assert kept in ({"RANK": "0"}, {"RANK": "0", name: None})


def test_there_are_forty_forms_of_secrets() -> None:
    assert len(SECRETS) >= 40
    recorded = [name for name, value in read_variables(SECRETS).items() if value is None]
    assert len(recorded) == len(SECRETS) - 5


def test_other_variables_are_not_recorded() -> None:
    environ = {"RANK": "0", "NCCL_ALGO": "Ring", "API_TOKEN": "secret", "PATH": "/bin", "MASTER_ADDR": "node1"}
    assert read_variables(environ) == {"RANK": "0", "NCCL_ALGO": "Ring", "MASTER_ADDR": "node1"}
    assert read_transport_variables(environ) == {"NCCL_ALGO": "Ring"}


@pytest.mark.parametrize("value", ["1" * 600, "a\nb", "tab\t", "\N{SNOWMAN}"])
def test_values_of_unusual_form_are_left_out(value: str) -> None:
    assert may_be_secret("NCCL_ALGO", value)
