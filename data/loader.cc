#include "data/loader.h"

#include <ATen/ops/empty.h>
#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/math.h"

namespace tessera::data {
namespace {

constexpr int64_t kHashedTokens = 4096;  // at each end of a file: cheap, and tells most files apart

const LoaderOptions& checked(const LoaderOptions& options) {
  TESSERA_CHECK_CONFIG(options.seq_len >= 1, "loader: seq_len is ", options.seq_len,
                       "; expected at least 1");
  TESSERA_CHECK_CONFIG(options.batch_size >= 1, "loader: batch_size is ", options.batch_size,
                       "; expected at least 1");
  TESSERA_CHECK_CONFIG(options.prefetch_batches >= 1, "loader: prefetch_batches is ",
                       options.prefetch_batches, "; expected at least 1");
  TESSERA_CHECK_CONFIG(options.vocab_size >= 0, "loader: vocab_size is ", options.vocab_size,
                       "; expected 0 (any token) or the model's");
  TESSERA_CHECK_CONFIG(options.epochs >= 0, "loader: epochs is ", options.epochs,
                       "; expected 0 (for ever) or more");
  return options;
}

std::vector<int64_t> count_samples(const std::vector<TokenFile>& files, int64_t seq_len) {
  TESSERA_CHECK_CONFIG(!files.empty(), "loader: no token file; name at least one");
  std::vector<int64_t> first_samples = {0};
  for (const TokenFile& file : files) {
    const int64_t samples = (file.size() - 1) / seq_len;
    TESSERA_CHECK_CONFIG(samples >= 1, "token file ", file.path(), " holds ", file.size(),
                         " tokens; one sample with seq_len ", seq_len, " needs ", seq_len + 1,
                         ". Use a smaller seq_len or more text.");
    first_samples.push_back(first_samples.back() + samples);
  }
  return first_samples;
}

SamplerOptions sampler_options(const LoaderOptions& options) {
  SamplerOptions result;
  result.world = options.world;
  result.rank = options.rank;
  result.shuffle = options.shuffle;
  result.seed = options.seed;
  result.drop_last = options.drop_last;
  return result;
}

int64_t hash_of(const std::vector<TokenFile>& files) {
  uint64_t hash = 0;
  for (const TokenFile& file : files) {
    const int64_t count = std::min(file.size(), kHashedTokens);
    const int64_t size = file.size();
    hash = XXH3_64bits_withSeed(&size, sizeof(size), hash);
    hash = XXH3_64bits_withSeed(file.data(), static_cast<size_t>(count) * 2, hash);
    hash = XXH3_64bits_withSeed(file.data() + size - count, static_cast<size_t>(count) * 2, hash);
  }
  return static_cast<int64_t>(hash);
}

std::vector<TokenFile> as_list(TokenFile file) {
  std::vector<TokenFile> files;
  files.push_back(std::move(file));
  return files;
}

}  // namespace

Loader::Loader(std::vector<TokenFile> files, const LoaderOptions& options)
    : files_(std::move(files)),
      options_(checked(options)),
      first_samples_(count_samples(files_, options_.seq_len)),
      sampler_(first_samples_.back(), sampler_options(options_)) {
  TESSERA_CHECK_CONFIG(
      batches_per_epoch() >= 1, "loader: ", num_samples(), " samples with seq_len ",
      options_.seq_len, " are fewer than one batch of ", options_.batch_size,
      " sequences on each of ", options_.world,
      " ranks. Use a smaller batch_size or seq_len, fewer ranks, more text, or no drop_last.");
  for (const TokenFile& file : files_) {
    // Random windows: reading ahead would fetch many pages that another rank needs, or nobody.
    options_.shuffle ? file.expect_random_access() : file.expect_sequential_access();
  }
  start();
}

Loader::Loader(TokenFile file, const LoaderOptions& options)
    : Loader(as_list(std::move(file)), options) {}

Loader::~Loader() { stop(); }

Batch Loader::next() {
  TESSERA_CHECK_CONFIG(!done(), "loader: next() after the last of ", options_.epochs,
                       " epochs; ask done() first, or seek() to start again");
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !queue_.empty() || error_; });
  if (queue_.empty()) std::rethrow_exception(error_);
  Built built = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  changed_.notify_all();
  position_ = built.after;
  return std::move(built.batch);
}

int64_t Loader::batches_per_epoch() const {
  return options_.drop_last ? sampler_.size() / options_.batch_size
                            : base::ceil_div(sampler_.size(), options_.batch_size);
}

void Loader::seek(Position position) {
  TESSERA_CHECK_CONFIG(position.epoch >= 0 && position.consumed_samples >= 0 &&
                           position.consumed_samples <= num_samples(),
                       "loader: no position at epoch ", position.epoch, ", sample ",
                       position.consumed_samples, "; an epoch has ", num_samples(), " samples");
  stop();
  position_ = settled(position);
  start();
}

void Loader::seek_batch(int64_t epoch, int64_t index) {
  TESSERA_CHECK_CONFIG(index >= 0 && index < batches_per_epoch(), "loader: no batch ", index,
                       "; an epoch has ", batches_per_epoch());
  seek({epoch, index * options_.batch_size * options_.world});
}

std::map<std::string, int64_t> Loader::state() const {
  return {{"epoch", position_.epoch},
          {"consumed_samples", position_.consumed_samples},
          {"samples", num_samples()},
          {"seq_len", options_.seq_len},
          {"shuffle", options_.shuffle ? 1 : 0},
          {"seed", static_cast<int64_t>(options_.seed)},
          {"data_hash", hash_of(files_)}};
}

void Loader::load_state(const std::map<std::string, int64_t>& state) {
  Position position;
  for (const auto& [key, own] : this->state()) {
    const auto found = state.find(key);
    TESSERA_CHECK_CONFIG(found != state.end(), "loader: the saved state has no '", key,
                         "'; it is not a state of a loader, or of an older version");
    if (key == "epoch") {
      position.epoch = found->second;
    } else if (key == "consumed_samples") {
      position.consumed_samples = found->second;
    } else {
      TESSERA_CHECK_CONFIG(
          found->second == own, "loader: the saved state has ", key, " ", found->second,
          ", this run has ", own, " (first file: ", files_[0].path(),
          "). Its position would mean other samples: resume with the same data, seq_len,"
          " seed and shuffle, or start the data anew.");
    }
  }
  seek(position);
}

void Loader::start() {
  stop_ = false;
  error_ = nullptr;
  queue_.clear();
  try {
    thread_ = std::thread([this, from = position_] { build_ahead(from); });
  } catch (...) {
    error_ = std::current_exception();  // so that a later next() does not wait for nobody
    throw;
  }
}

void Loader::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// The thread. It only reads files_, options_ and first_samples_, and owns sampler_'s epoch.
void Loader::build_ahead(Position from) {
  try {
    while (options_.epochs == 0 || from.epoch < options_.epochs) {
      Built built = build(from);
      from = built.after;
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] {
        return stop_ || static_cast<int64_t>(queue_.size()) < options_.prefetch_batches;
      });
      if (stop_) return;
      queue_.push_back(std::move(built));
      lock.unlock();
      changed_.notify_all();
    }
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::current_exception();
    changed_.notify_all();
  }
}

Loader::Built Loader::build(Position at) {
  const int64_t num_rows = rows_at(at.consumed_samples);
  Built built;
  built.batch.epoch = at.epoch;
  built.batch.index = at.consumed_samples / (options_.batch_size * options_.world);
  fill_rows(at, num_rows, built.batch);
  built.after = settled({at.epoch, at.consumed_samples + num_rows * options_.world});
  built.batch.last_of_epoch = built.after.epoch != at.epoch;
  return built;
}

void Loader::fill_rows(Position at, int64_t num_rows, Batch& batch) {
  const int64_t seq_len = options_.seq_len;
  sampler_.set_epoch(at.epoch);
  batch.tokens = at::empty({num_rows, seq_len}, at::kLong);
  batch.targets = at::empty({num_rows, seq_len}, at::kLong);
  std::vector<std::pair<int64_t, int64_t>> places(static_cast<size_t>(num_rows));
  for (int64_t row = 0; row < num_rows; ++row) {
    auto& [file, first] = places[static_cast<size_t>(row)];
    locate(sampler_.global_at(at.consumed_samples + row * options_.world + options_.rank), file,
           first);
    // All rows first, so that the disk serves them together.
    files_[static_cast<size_t>(file)].will_need(first, seq_len + 1);
  }
  int64_t* tokens = batch.tokens.mutable_data_ptr<int64_t>();
  int64_t* targets = batch.targets.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto [file, first] = places[static_cast<size_t>(row)];
    copy_row(files_[static_cast<size_t>(file)], first, tokens + row * seq_len,
             targets + row * seq_len);
  }
}

void Loader::copy_row(const TokenFile& file, int64_t first, int64_t* tokens,
                      int64_t* targets) const {
  const int64_t seq_len = options_.seq_len;
  const uint16_t* from = file.data() + first;
  if (options_.vocab_size > 0) {
    for (int64_t i = 0; i <= seq_len; ++i) {
      TESSERA_CHECK_CONFIG(from[i] < options_.vocab_size, "token file ", file.path(), " has token ",
                           from[i], " at position ", first + i,
                           "; expected tokens below vocab_size ", options_.vocab_size,
                           ". Was the file made with another tokenizer than the model's?");
    }
  }
  std::copy(from, from + seq_len, tokens);
  std::copy(from + 1, from + 1 + seq_len, targets);
}

void Loader::locate(int64_t sample, int64_t& file, int64_t& first_token) const {
  const auto next = std::upper_bound(first_samples_.begin(), first_samples_.end(), sample);
  file = next - first_samples_.begin() - 1;
  first_token = (sample - first_samples_[static_cast<size_t>(file)]) * options_.seq_len;
}

// Rows of each rank's batch after so many samples of an epoch; 0 when the epoch is over. Equal on
// all ranks.
int64_t Loader::rows_at(int64_t consumed_samples) const {
  const int64_t left = std::max<int64_t>(num_samples() - consumed_samples, 0);
  if (!options_.drop_last) {
    return std::min(options_.batch_size, base::ceil_div(left, options_.world));
  }
  return left / options_.world >= options_.batch_size ? options_.batch_size : 0;
}

Position Loader::settled(Position position) const {
  return rows_at(position.consumed_samples) > 0 ? position : Position{position.epoch + 1, 0};
}

}  // namespace tessera::data
