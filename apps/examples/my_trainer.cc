#include <torch/torch.h>

#include <iostream>

#include "comm/world.h"
#include "optim/adamw.h"
#include "train/parallelize.h"

struct BlockImpl : torch::nn::Module {
  torch::nn::Linear up = register_module("up", torch::nn::Linear(64, 256));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(256, 64));
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
};
TESSERA_MODULE(Block);  // was TORCH_MODULE(Block)

struct NetImpl : torch::nn::Module {
  Block first = register_module("first", Block());
  Block second = register_module("second", Block());
  torch::Tensor forward(torch::Tensor x) { return second(first(x)); }
};
TESSERA_MODULE(Net);

int main() {
  auto world = tessera::comm::init();  // from the launcher's variables, or one process alone
  Net net;
  tessera::Policy policy;
  policy.strategy = tessera::Strategy::kFullShard;  // or kReplicate
  policy.precision = tessera::precision::fp32();    // or bf16()
  policy.units = tessera::units_of<Block>();
  auto parallel = tessera::parallelize(net, world, policy);
  tessera::optim::AdamW adamw(parallel.owned_params());
  torch::manual_seed(1 + world.rank());  // each rank draws its own data
  for (int step = 0; step < 20; ++step) {
    torch::Tensor loss;
    for (int micro = 0; micro < 2; ++micro) {
      auto sync = parallel.sync_gradients(/*is_last_micro_batch=*/micro == 1);
      const torch::Tensor x = torch::randn({8, 64});
      loss = torch::mse_loss(net(x), x.sin());
      (loss / 2).backward();
    }
    parallel.clip_grad_norm(1.0);
    adamw.step();
    adamw.zero_grad();
    if (world.rank() == 0) std::cout << step << ' ' << loss.item<double>() << '\n';
  }
  world.barrier();  // rank 0 serves the others' store: it leaves last
}
