#include "comm/collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "base/error.h"
#include "base/math.h"

namespace tessera::comm {
namespace {

using Path = Group::Path;

// Sums are taken in pieces that stay in the second-level cache, so that W operands are read once from memory.
constexpr int64_t kPieceElements = 1 << 15;

[[noreturn]] void fail(const Group& group, const std::string& what, int peer, const char* reason) {
  throw CommError(base::str(
      "rank ", group.rank(), ": ", what, peer >= 0 ? base::str(" with rank ", peer) : "", " failed: ",
      reason, ". ", peer >= 0 ? base::str("Rank ", peer) : std::string("A rank"),
      " has ended, is later than the time limit of ", group.timeout().count() / 1000.0,
      " s, or runs other modules than this rank; see its output. Restart from a checkpoint."));
}

// The messages of one exchange. Receives are posted first so that no sender waits for a buffer.
class Exchange {
 public:
  Exchange(Group& group, const std::string& what)
      : group_(group), what_(what), tag_(group.next_tag()) {}

  void receive(const at::Tensor& into, int peer) {
    post(peer, [&](std::vector<at::Tensor>& list) {
      return group_.backend().recv(list, peer, tag_);
    }, into);
  }
  void send(const at::Tensor& from, int peer) {
    post(peer, [&](std::vector<at::Tensor>& list) {
      return group_.backend().send(list, peer, tag_);
    }, from);
  }
  void wait() {
    for (auto& [peer, work] : works_) {
      try {
        work->wait(group_.timeout());
      } catch (const std::exception& e) {
        fail(group_, what_, peer, e.what());
      }
    }
  }

 private:
  template <typename Start>
  void post(int peer, Start start, const at::Tensor& tensor) {
    if (tensor.numel() == 0) return;
    std::vector<at::Tensor> list{tensor};
    try {
      works_.emplace_back(peer, start(list));
    } catch (const std::exception& e) {
      fail(group_, what_, peer, e.what());
    }
  }

  Group& group_;
  const std::string& what_;
  int tag_;
  std::vector<std::pair<int, c10::intrusive_ptr<c10d::Work>>> works_;
};

// Peers in an order in which at any time each rank receives from one rank only.
int peer_to(const Group& group, int distance) { return (group.rank() + distance) % group.size(); }
int peer_from(const Group& group, int distance) {
  return (group.rank() - distance + group.size()) % group.size();
}

// out = (parts[0] + parts[1] + ...) / parts.size(), in that order, in out's dtype. `out` may be one of the parts.
void mean_in_order(const at::Tensor& out, const std::vector<at::Tensor>& parts) {
  const auto ranks = static_cast<int64_t>(parts.size());
  const bool power_of_two = (ranks & (ranks - 1)) == 0;
  const int64_t elements = out.numel();
  const at::Tensor scratch = at::empty({std::min(elements, kPieceElements)}, out.options());
  for (int64_t begin = 0; begin < elements; begin += kPieceElements) {
    const int64_t size = std::min(kPieceElements, elements - begin);
    const auto piece = [&](const at::Tensor& t) { return t.narrow(0, begin, size); };
    at::Tensor sum = scratch.narrow(0, 0, size);
    if (parts[0].scalar_type() == out.scalar_type()) {
      at::add_out(sum, piece(parts[0]), piece(parts[1]));
    } else {
      sum.copy_(piece(parts[0])).add_(piece(parts[1]));
    }
    for (int64_t i = 2; i < ranks; ++i) sum.add_(piece(parts[i]));
    at::Tensor target = piece(out);
    if (power_of_two) {
      at::mul_out(target, sum, at::scalar_tensor(1.0 / static_cast<double>(ranks), out.options()));  // the bits of the quotient
    } else {
      at::div_out(target, sum, at::scalar_tensor(static_cast<double>(ranks), out.options()));
    }
  }
}

// Runs a native collective and waits for it by the backend's rules (host on CPU, stream on CUDA).
template <typename Start>
void run_native(Group& group, const std::string& what, Start start) {
  try {
    start()->wait(group.timeout());
  } catch (const std::exception& e) {
    fail(group, what, -1, e.what());
  }
}

}  // namespace

void all_gather_in_place(Group& group, const at::Tensor& flat, const std::string& what) {
  const int64_t part = flat.numel() / group.size();
  const auto slot = [&](int rank) { return flat.narrow(0, rank * part, part); };
  if (group.path() == Path::kNone) return;
  if (group.path() == Path::kDirect) {
    Exchange exchange(group, what);
    for (int d = 1; d < group.size(); ++d) exchange.receive(slot(peer_from(group, d)), peer_from(group, d));
    for (int d = 1; d < group.size(); ++d) exchange.send(slot(group.rank()), peer_to(group, d));
    exchange.wait();
    return;
  }
  at::Tensor output = flat;
  at::Tensor input = slot(group.rank());
  run_native(group, what, [&] { return group.backend()._allgather_base(output, input); });
}

void reduce_scatter_mean(Group& group, const at::Tensor& full, const at::Tensor& out,
                         const at::Tensor& scratch, const std::string& what) {
  const int64_t part = out.numel();
  const auto slot = [&](int rank) { return full.narrow(0, rank * part, part); };
  if (group.path() == Path::kNone) {
    at::Tensor target = out;
    target.copy_(full);
    return;
  }
  if (group.path() == Path::kDirect) {
    Exchange exchange(group, what);
    std::vector<at::Tensor> parts(group.size());
    parts[group.rank()] = slot(group.rank());
    for (int d = 1; d < group.size(); ++d) {
      const int peer = peer_from(group, d);
      parts[peer] = scratch.narrow(0, (d - 1) * part, part);
      exchange.receive(parts[peer], peer);
    }
    for (int d = 1; d < group.size(); ++d) exchange.send(slot(peer_to(group, d)), peer_to(group, d));
    exchange.wait();
    mean_in_order(out, parts);
    return;
  }
  at::Tensor output = out;
  at::Tensor input = full;
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  TESSERA_CHECK(out.scalar_type() == full.scalar_type(), "native reduce-scatter of ", full.dtype(),
                " into ", out.dtype(), ".");
  run_native(group, what, [&] { return group.backend()._reduce_scatter_base(output, input, options); });
}

int64_t reduce_scatter_scratch_parts(const Group& group) {
  return group.path() == Path::kDirect ? group.size() - 1 : 0;
}

void all_reduce_mean(Group& group, const at::Tensor& flat, const at::Tensor& scratch,
                     const std::string& what) {
  if (group.path() == Path::kNone) return;
  if (group.path() == Path::kNative) {
    std::vector<at::Tensor> list{flat};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    run_native(group, what, [&] { return group.backend().allreduce(list, options); });
    return;
  }
  // A reduce-scatter of parts that differ by at most one element, then an all-gather of the means.
  const auto slot = [&](int rank) {
    const base::Interval part = base::even_part(flat.numel(), group.size(), rank);
    return flat.narrow(0, part.begin, part.size());
  };
  const at::Tensor mine = slot(group.rank());
  Exchange scatter(group, what);
  std::vector<at::Tensor> parts(group.size());
  parts[group.rank()] = mine;
  for (int d = 1; d < group.size(); ++d) {
    const int peer = peer_from(group, d);
    parts[peer] = scratch.narrow(0, (d - 1) * mine.numel(), mine.numel());
    scatter.receive(parts[peer], peer);
  }
  for (int d = 1; d < group.size(); ++d) scatter.send(slot(peer_to(group, d)), peer_to(group, d));
  scatter.wait();
  mean_in_order(mine, parts);
  Exchange gather(group, what);
  for (int d = 1; d < group.size(); ++d) gather.receive(slot(peer_from(group, d)), peer_from(group, d));
  for (int d = 1; d < group.size(); ++d) gather.send(mine, peer_to(group, d));
  gather.wait();
}

int64_t all_reduce_scratch_elements(const Group& group, int64_t elements) {
  if (group.path() != Path::kDirect) return 0;
  return base::ceil_div(elements, group.size()) * (group.size() - 1);
}

void broadcast(Group& group, const at::Tensor& flat, const std::string& what) {
  if (group.path() == Path::kNone || flat.numel() == 0) return;
  std::vector<at::Tensor> list{flat};
  run_native(group, what, [&] { return group.backend().broadcast(list); });
}

}  // namespace tessera::comm
