"""`python -m bench`: the workloads whose exact counts gate. The other benches are commands of their own."""

from bench.workloads import main

main()
