import torch
import torch.distributed as dist

import ultraep

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # every rank has its own tokens
config = ultraep.BalanceConfig(objective="balance")  # the default weighs measured costs, too
balancer = ultraep.Balancer(experts=16, slots=1, config=config)  # one spare slot on every rank
moe = ultraep.BalancedMoE.swiglu(hidden=256, ffn=512, experts=16, top_k=2, balancer=balancer)
x = (torch.randn(2048, 256) + 0.5).requires_grad_()  # the router prefers some experts
y = moe(x)
y.sum().backward()  # adds the gradients of replicas to their home experts
plan = moe.last_plan
if balancer.rank == 0:
    print("rows per rank:", plan.initial_rank_loads, "->", plan.rank_loads)
    print(f"imbalance: {plan.initial_imbalance:.2f} -> {plan.imbalance:.2f}")
    print("replicas:", plan.num_replicas)
torch.testing.assert_close(y, moe(x, policy="none"))  # the output without balancing
balancer.close()
dist.destroy_process_group()
