#include "comm/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/error.h"

namespace tessera::comm {
namespace {

template <typename Start>
void run(const World& world, const char* what, Start start) {
  try {
    start(world.host().backend())->wait(world.host().timeout());
  } catch (const std::exception& e) {
    throw CommError(base::str("rank ", world.rank(), ": agreement of all ranks on ", what, " failed: ", e.what(),
                              ". A rank has ended or is late; see the output of the others."));
  }
}

bool is_local(const World& world) {
  return world.host().path() == Group::Path::kNone || world.is_fake();
}

// Row r: rank r's `mine`. Shapes: mine: [N] on every rank.
at::Tensor gather_rows(const World& world, const at::Tensor& mine, const char* what) {
  std::vector<at::Tensor> inputs{mine};
  std::vector<std::vector<at::Tensor>> outputs(1);
  const at::Tensor rows = at::empty({world.size(), mine.numel()}, mine.options());
  for (int r = 0; r < world.size(); ++r) outputs[0].push_back(rows.select(0, r));
  run(world, what, [&](c10d::Backend& host) { return host.allgather(outputs, inputs); });
  for (int r = 0; r < world.size(); ++r) rows.select(0, r).copy_(outputs[0][r]);
  return rows;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::vector<std::string> texts_of_ranks(const World& world, const std::string& text) {
  if (is_local(world)) return std::vector<std::string>(world.size(), text);
  const auto size = static_cast<int64_t>(text.size());
  const at::Tensor sizes =
      gather_rows(world, at::empty({1}, at::kLong).fill_(size), "the sizes of texts");
  const int64_t longest = sizes.max().item<int64_t>();
  if (longest == 0) return std::vector<std::string>(world.size());
  at::Tensor mine = at::zeros({longest}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  const at::Tensor rows = gather_rows(world, mine, "texts");
  std::vector<std::string> texts;
  for (int r = 0; r < world.size(); ++r) {
    texts.emplace_back(static_cast<const char*>(rows.select(0, r).data_ptr()),
                       static_cast<size_t>(sizes[r].item<int64_t>()));
  }
  return texts;
}

void all_or_none(const World& world, const std::function<void()>& work) {
  std::exception_ptr mine;
  std::string message;
  try {
    work();
  } catch (const std::exception& e) {
    mine = std::current_exception();
    message = e.what();
    if (message.empty()) message = "unknown error";
  }
  const std::vector<std::string> messages = texts_of_ranks(world, message);
  if (mine) std::rethrow_exception(mine);
  for (int r = 0; r < world.size(); ++r) {
    if (!messages[r].empty()) throw ConfigError(base::str("rank ", r, " failed: ", messages[r]));
  }
}

void check_same(const World& world, const std::string& what, const std::string& value) {
  const std::vector<std::string> values = texts_of_ranks(world, value);
  for (int r = 1; r < world.size(); ++r) {
    if (values[r] == values[0]) continue;
    const std::vector<std::string> first = lines_of(values[0]);
    const std::vector<std::string> other = lines_of(values[r]);
    size_t i = 0;
    while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
    throw ConfigError(base::str("the ranks disagree on ", what, ": rank 0 has ",
                                i < first.size() ? "'" + first[i] + "'" : std::string("nothing"), " where rank ", r, " has ",
                                i < other.size() ? "'" + other[i] + "'" : std::string("nothing"),
                                ". Give every rank the same model and options."));
  }
}

std::vector<double> sum_over_ranks(const World& world, const std::vector<double>& values) {
  if (is_local(world)) return values;
  at::Tensor mine = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  std::copy(values.begin(), values.end(), mine.data_ptr<double>());
  const at::Tensor rows = gather_rows(world, mine, "a sum");
  std::vector<double> sums(values.size(), 0.0);
  for (int r = 0; r < world.size(); ++r) {
    const double* row = rows.data_ptr<double>() + r * values.size();
    for (size_t i = 0; i < values.size(); ++i) sums[i] += row[i];
  }
  return sums;
}

double sum_over_ranks(const World& world, double value) {
  return sum_over_ranks(world, std::vector<double>{value})[0];
}

void any_over_ranks(const World& world, std::vector<uint8_t>& flags) {
  if (is_local(world) || flags.empty()) return;
  std::vector<at::Tensor> list{
      at::from_blob(flags.data(), {static_cast<int64_t>(flags.size())}, at::kByte)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  run(world, "which parameters were used",
      [&](c10d::Backend& host) { return host.allreduce(list, options); });
}

}  // namespace tessera::comm
