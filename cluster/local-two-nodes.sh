#!/usr/bin/env bash
# Two Ray nodes on this machine, one job on both, and away with them again:
#
#     cluster/local-two-nodes.sh jobs/quickstart.yaml
#
# The job's workers are spread over the two nodes; nothing listens outside loopback.
set -euo pipefail

job=${1:-jobs/quickstart.yaml}
trap 'rayzero3 cluster down' EXIT

rayzero3 cluster up --nodes 2
rayzero3 submit "$job"
