import torch
import torch.distributed as dist

import ultraep

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(dist.get_rank())  # every rank has its own tokens
balancer = ultraep.Balancer(experts=16, slots=1)  # one spare slot per rank
moe = ultraep.BalancedMoE.swiglu(512, 1024, experts=16, top_k=2, balancer=balancer, seed=3)

x = (torch.randn(2048, 512) + 0.5).requires_grad_()  # the router prefers some experts
if balancer.rank == 0:
    print("compiling, and measuring what rows and replicas cost: some seconds ...")
y = moe(x)
y.sum().backward()  # adds the gradients of replicas to their home experts
if balancer.rank == 0:
    plan = moe.last_plan
    print("rows per rank:", plan.initial_rank_loads, "->", plan.rank_loads)
    print(f"imbalance: {plan.initial_imbalance:.2f} -> {plan.imbalance:.2f}")
    print("replicas:", plan.num_replicas)
torch.testing.assert_close(y, moe(x, policy="none"))  # same output without balancing

balancer.close()
dist.destroy_process_group()
