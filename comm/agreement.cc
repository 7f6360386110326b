#include "comm/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>

#include "base/error.h"
#include "comm/exchange.h"

namespace tessera::comm {
namespace {

bool is_local(const World& world) {
  return world.host().path() == Group::Path::kNone || world.is_fake();
}

// Row r: rank r's `mine`. Shapes: mine: [N] on every rank.
at::Tensor gather_rows(const World& world, const at::Tensor& mine, const char* subject) {
  const std::string what = base::str("agreement on ", subject);
  Group& host = world.host();
  const at::Tensor rows = at::empty({world.size(), mine.numel()}, mine.options());
  rows.select(0, world.rank()).copy_(mine);
  Exchange exchange(host, what);
  for (int d = 1; d < host.size(); ++d) {
    exchange.receive(rows.select(0, peer_from(host, d)), peer_from(host, d));
  }
  for (int d = 1; d < host.size(); ++d) exchange.send(mine, peer_to(host, d));
  exchange.wait_all();
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
  } catch (...) {
    mine = std::current_exception();
    message = "an exception that is no std::exception";
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
                                i < first.size() ? "'" + first[i] + "'" : std::string("nothing"),
                                " where rank ", r, " has ",
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
  const auto size = static_cast<int64_t>(flags.size());
  const at::Tensor mine = at::from_blob(flags.data(), {size}, at::kByte).clone();
  const at::Tensor rows = gather_rows(world, mine, "which parameters were used");
  const at::Tensor any = rows.amax(0);
  std::copy_n(any.data_ptr<uint8_t>(), flags.size(), flags.begin());
}

}  // namespace tessera::comm
