#include "train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/error.h"

namespace tessera::train {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

// "nan" without a sign, as Python prints it; printf may say "-nan".
double unsigned_nan(double value) { return std::isnan(value) ? std::fabs(value) : value; }

std::string format(const char* pattern, double value) {
  char text[400];  // the largest double has 309 digits before the point
  std::snprintf(text, sizeof(text), pattern, unsigned_nan(value));
  return text;
}

// Like format(), with a comma before every third digit of the integer part.
std::string format_grouped(const char* pattern, double value) {
  std::string text = format(pattern, value);
  if (!std::isfinite(value)) return text;
  const size_t first = text[0] == '-' ? 1 : 0;
  size_t at = text.find('.');
  if (at == std::string::npos) at = text.size();
  while (at > first + 3) {
    at -= 3;
    text.insert(at, ",");
  }
  return text;
}

void write_all(int fd, const std::string& line, const std::string& where) {
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t written = ::write(fd, line.data() + done, line.size() - done);
    if (written < 0 && errno == EINTR) continue;
    TESSERA_CHECK_CONFIG(written > 0, "cannot write the metrics to ", where, ": ",
                         std::strerror(errno));
    done += static_cast<size_t>(written);
  }
}

void put(nlohmann::ordered_json& json, const std::string& name, double value) {
  if (std::isfinite(value)) {
    json[name] = value;
    return;
  }
  json[name] = nullptr;
  json[name + "_is"] = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

// A run that was killed in the middle of a line leaves a torn one; it must not spoil the next.
bool ends_inside_a_line(int fd) {
  const off_t size = ::lseek(fd, 0, SEEK_END);
  char last = '\n';
  return size > 0 && ::pread(fd, &last, 1, size - 1) == 1 && last != '\n';
}

}  // namespace

// Source: torchtitan, components/metrics.py (MetricsProcessor.log), without its colours.
std::string metrics_line(const StepMetrics& metrics) {
  char step[32];
  std::snprintf(step, sizeof(step), "%2lld", static_cast<long long>(metrics.step));
  std::string line = base::str("step: ", step);
  line += "  loss: " + format("%8.5f", metrics.loss);
  line += "  grad_norm: " + format("%7.4f", metrics.grad_norm);
  line += "  memory: " + format("%5.2f", static_cast<double>(metrics.memory_bytes) / kGiB) +
          "GiB(" + format("%.2f", 100 * metrics.memory_fraction) + "%)";
  line += "  tps: " + format_grouped("%.0f", metrics.tps);
  line += "  tflops: " + format_grouped("%.2f", metrics.tflops);
  line += "  mfu: " + (metrics.mfu ? format("%.2f", 100 * *metrics.mfu) + "%" : "N/A");
  return line;
}

std::string metrics_json(const StepMetrics& metrics) {
  nlohmann::ordered_json json;
  json["step"] = metrics.step;
  put(json, "loss", metrics.loss);
  put(json, "grad_norm", metrics.grad_norm);
  put(json, "lr", metrics.lr);
  json["memory_bytes"] = metrics.memory_bytes;
  put(json, "memory_fraction", metrics.memory_fraction);
  put(json, "tps", metrics.tps);
  put(json, "tflops", metrics.tflops);
  if (metrics.mfu) {
    put(json, "mfu", *metrics.mfu);
  } else {
    json["mfu"] = nullptr;
  }
  json["tokens_seen"] = metrics.tokens_seen;
  put(json, "step_seconds", metrics.step_seconds);
  put(json, "data_seconds", metrics.data_seconds);
  return json.dump();
}

MetricsWriter::MetricsWriter(const std::string& dump_folder)
    : path_((std::filesystem::path(dump_folder) / "metrics.jsonl").string()) {
  std::error_code error;
  std::filesystem::create_directories(dump_folder, error);
  TESSERA_CHECK_CONFIG(!error, "cannot make the folder '", dump_folder,
                       "' (job.dump_folder): ", error.message());
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  TESSERA_CHECK_CONFIG(fd_ >= 0, "cannot open '", path_,
                       "' for the metrics (job.dump_folder): ", std::strerror(errno));
  if (ends_inside_a_line(fd_)) write_all(fd_, "\n", "'" + path_ + "'");
}

MetricsWriter::~MetricsWriter() { ::close(fd_); }

void MetricsWriter::write(const StepMetrics& metrics) {
  write_all(STDOUT_FILENO, metrics_line(metrics) + "\n", "standard output");
  write_all(fd_, metrics_json(metrics) + "\n", "'" + path_ + "'");
  TESSERA_CHECK_CONFIG(!metrics.mfu || !(*metrics.mfu > 1), "step ", metrics.step, ": mfu is ",
                       format("%.2f", 100 * metrics.mfu.value_or(0)),
                       "%, more than all of the device; metrics.peak_flops is too low for it. Give "
                       "its true peak, or 0 to leave mfu out.");
}

}  // namespace tessera::train
