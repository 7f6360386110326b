#ifndef TRAIN_METRICS_H_
#define TRAIN_METRICS_H_

// What a training step reports: a line for people, torchtitan's to the letter, and a line of JSON
// for programs.

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::train {

struct StepMetrics {
  int64_t step = 0;  // of the optimizer, from 1
  double loss = 0;   // mean over the global batch
  double grad_norm = 0;
  double lr = 0;
  int64_t memory_bytes = 0;    // resident, of this rank
  double memory_fraction = 0;  // of the machine's
  double tps = 0;              // tokens per second and rank
  double tflops = 0;           // of the model's arithmetic, per rank
  std::optional<double> mfu;   // tflops as a part of the device's peak; none: the peak is unknown
  int64_t tokens_seen = 0;     // by all ranks, since the first step
  double step_seconds = 0;     // of one step, mean since the last report
  double data_seconds = 0;     // the part of it that waited for data
};

// Without the end of line; "mfu: N/A" where the peak is unknown; in one line:
// "step:  1  loss:  8.13980  grad_norm:  1.5000  memory:  0.21GiB(0.66%)  tps: 12,345
//  tflops: 1.23  mfu: 4.50%"
std::string metrics_line(const StepMetrics& metrics);

// One JSON object with the fields above under their names, memory_fraction and mfu as parts of 1,
// an unknown mfu as null. JSON has no NaN and no infinity: such a field is null, and a field
// NAME_is says "nan", "inf" or "-inf". Without the end of line.
std::string metrics_json(const StepMetrics& metrics);

// Appends to DUMP_FOLDER/metrics.jsonl and prints to standard output, each line with one write, so
// that what was reported survives a crash. For one rank of the run (rank 0); a resumed run goes on
// in the same file.
class MetricsWriter {
 public:
  // Makes the folder when it is missing.
  // Errors: ConfigError when folder or file cannot be made or opened.
  explicit MetricsWriter(const std::string& dump_folder);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // Errors: ConfigError when a line cannot be written (disk full, closed pipe), and for an mfu over
  //         1, which means that the given peak is too low. This rank is alone with it: the caller
  //         lets it end the run.
  void write(const StepMetrics& metrics);

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_;
};

}  // namespace tessera::train

#endif  // TRAIN_METRICS_H_
