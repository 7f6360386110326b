#include "train/trainer.h"

#include <cmath>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/resident_memory.h"
#include "base/stopwatch.h"
#include "comm/agreement.h"

namespace tessera::train {

Trainer::Trainer(comm::World world, Parallel& parallel, data::Loader& loader, Loss loss,
                 Update update, Report report, TrainerOptions options)
    : world_(std::move(world)),
      parallel_(parallel),
      loader_(loader),
      loss_(std::move(loss)),
      update_(std::move(update)),
      report_(std::move(report)),
      options_(options) {
  TESSERA_CHECK_CONFIG(options_.steps > 0 && options_.micro_batches > 0 && options_.log_freq > 0,
                       "a trainer of ", options_.steps, " steps, ", options_.micro_batches,
                       " micro-batches and a report every ", options_.log_freq,
                       " steps: expected numbers above 0.");
  TESSERA_CHECK_CONFIG(options_.max_norm > 0, "training.max_norm = ", options_.max_norm,
                       ": expected more than 0.");
  options_.lr_schedule.validate();
}

double Trainer::run() {
  double loss = 0;
  for (int64_t step = 1; step <= options_.steps; ++step) {
    const base::Stopwatch stopwatch;
    const std::vector<data::Batch> batches = fetch();
    data_seconds_ += stopwatch.seconds();
    loss = mean_over_ranks(step, window(batches));
    const double norm = parallel_.clip_grad_norm(options_.max_norm);
    TESSERA_CHECK_CONFIG(
        std::isfinite(norm), "step ", step, ": the norm of the gradients is ", norm,
        " though the loss is ", loss,
        ". The parameters are those of the step before. Lower optimizer.lr or train in float32.");
    const double lr = options_.lr_schedule.lr(step - 1);
    update_(lr);
    ++steps_;
    seconds_ += stopwatch.seconds();
    if (step == 1 || step == options_.steps || step % options_.log_freq == 0)
      report(step, loss, norm, lr);
  }
  return loss;
}

// All batches of the step at once, so that a rank whose data is bad says so before the others wait
// for it in a gather.
std::vector<data::Batch> Trainer::fetch() {
  std::vector<data::Batch> batches;
  comm::all_or_none(world_, [&] {
    for (int64_t m = 0; m < options_.micro_batches; ++m) batches.push_back(loader_.next());
  });
  for (const data::Batch& batch : batches) tokens_ += batch.tokens.numel();
  return batches;
}

double Trainer::window(const std::vector<data::Batch>& batches) {
  const auto count = static_cast<int64_t>(batches.size());
  double sum = 0;
  for (int64_t m = 0; m < count; ++m) {
    const auto sync = parallel_.sync_gradients(/*is_last_micro_batch=*/m == count - 1);
    const at::Tensor loss = loss_(batches[m]);
    (count == 1 ? loss : loss / count).backward();
    sum += loss.item<double>();
  }
  return sum / static_cast<double>(count);
}

double Trainer::mean_over_ranks(int64_t step, double loss) {
  std::vector<double> losses(world_.size(), 0.0);
  losses[world_.rank()] = loss;
  losses = comm::sum_over_ranks(world_, losses);
  double sum = 0;
  for (int rank = 0; rank < world_.size(); ++rank) {
    TESSERA_CHECK_CONFIG(std::isfinite(losses[rank]), "step ", step, ": the loss on rank ", rank,
                         " is ", losses[rank],
                         ". The parameters are those of the step before. Lower optimizer.lr, or "
                         "look at that rank's data.");
    sum += losses[rank];
  }
  return sum / world_.size();
}

void Trainer::report(int64_t step, double loss, double norm, double lr) {
  const base::ResidentMemory memory = base::resident_memory();
  StepMetrics metrics;
  metrics.step = step;
  metrics.loss = loss;
  metrics.grad_norm = norm;
  metrics.lr = lr;
  metrics.memory_bytes = memory.current_bytes;
  metrics.memory_fraction =
      static_cast<double>(memory.current_bytes) / static_cast<double>(base::machine_memory_bytes());
  metrics.tps = static_cast<double>(tokens_) / seconds_;
  metrics.tflops = metrics.tps * options_.flops_per_token / 1e12;
  if (options_.peak_flops > 0)
    metrics.mfu = metrics.tps * options_.flops_per_token / options_.peak_flops;
  tokens_seen_ += tokens_ * world_.size();
  metrics.tokens_seen = tokens_seen_;
  metrics.step_seconds = seconds_ / static_cast<double>(steps_);
  metrics.data_seconds = data_seconds_ / static_cast<double>(steps_);
  steps_ = 0;
  tokens_ = 0;
  seconds_ = 0;
  data_seconds_ = 0;
  // A report that fails on one rank (rank 0's disk is full) must end all of them.
  comm::all_or_none(world_, [&] { report_(metrics); });
}

}  // namespace tessera::train
