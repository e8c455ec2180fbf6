// A C function around the planner of the public UltraEP release, for bench_public.py. It is compiled
// together with the release's csrc/kernels/placement.cu and passes the defaults of its Manager.

#include <string>

#include "kernels/api.cuh"
#include "utils/exception.cuh"

namespace ultra_ep::runtime {  // of the release's runtime, which needs NVSHMEM
bool is_runtime_initialized = false;
int rank_idx = 0;
}  // namespace ultra_ep::runtime

// Queue one plan on the stream. tables: addresses of the six outputs, in the order of the release.
// Returns null, or a message.
extern "C" const char* plan(const int* loads, const int* loads_by_rank, int** tables, void* stream,
                            int experts, int ranks, int slots, int source) {
    static std::string message;
    try {
        ultra_ep::kernels::solve_placement(
            loads, loads_by_rank, tables[0], tables[1], tables[2], tables[3], tables[4], tables[5],
            static_cast<cudaStream_t>(stream), experts, ranks, experts / ranks, slots,
            /*num_nvl_ranks=*/ranks, /*max_replicas_dim=*/ranks, /*balance_threshold=*/1.0f,
            /*min_tokens_per_replica=*/1024, /*allow_zero_master_quota=*/false,
            /*locality_aware=*/true, /*oracle_eps=*/0.01f, /*kernel_stage=*/1, source);
        return nullptr;
    } catch (const std::exception& error) {
        message = error.what();
        return message.c_str();
    }
}
