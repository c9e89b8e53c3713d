"""Where a process stands, from what launchers say and from options."""

import pytest

from meshes.clusters import FIRST_PORT, Cluster, find_cluster, first_host

SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_NODELIST": "node[007-012],other",
    "SLURM_NTASKS": "24",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x6)",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015]", "node001"),
        ("rack[3-4]-a", "rack3-a"),
        ("login,node[1-2]", "login"),
    ],
)
def test_first_host_of_a_slurm_list(nodes, first):
    assert first_host(nodes) == first


def test_slurm_with_one_task_per_gpu_and_with_one_per_node():
    found = find_cluster(environment=SLURM)
    assert found == Cluster(
        coordinator=f"node007:{FIRST_PORT + 3}",
        num_processes=24,
        process_id=9,
        local_device=1,
        source="Slurm",
    )
    alone = find_cluster(environment=SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x24)"})
    assert alone.local_device is None  # all devices of its node


def test_open_mpi_and_tpu_pods():
    mpi = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.0.0.1,10.1.0.1:4567",
    }
    found = find_cluster(environment=mpi)
    assert (found.coordinator, found.process_id) == (f"10.0.0.1:{FIRST_PORT + 2}", 2)
    pod = {
        "TPU_WORKER_HOSTNAMES": "a,b,c",
        "TPU_WORKER_ID": "1",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "first:80",
    }
    found = find_cluster(environment=pod)
    assert (found.coordinator, found.num_processes, found.process_id) == ("first:8482", 6, 4)


def test_options_win_and_complete_what_is_missing():
    found = find_cluster("here:1234", environment=SLURM)
    assert (found.coordinator, found.process_id, found.local_device) == ("here:1234", 9, 1)
    newer = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}  # names no address
    with pytest.raises(ValueError, match="coordinator unknown: no Slurm step"):
        find_cluster(environment=newer)
    assert find_cluster("here:1234", environment=newer).num_processes == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, None, None), "coordinator, num_processes, process_id unknown"),
        (("here", 2, 0), "coordinator='here' is not HOST:PORT"),
        (("here:99999", 2, 0), "coordinator='here:99999' is not HOST:PORT"),
        (("here:1234", 2, 2), r"process_id=2 must be in 0\.\.1"),
        (("here:1234", 0, 0), "num_processes=0 must be at least 1"),
    ],
)
def test_values_that_cannot_be_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        find_cluster(*options, environment={})
