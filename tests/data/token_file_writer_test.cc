// Goal: a token file appears whole or not at all.
// Method: round trips, and writes that the system refuses half way (a limit on file size; a folder
// in the way).

#include "data/token_file_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/token_file.h"
#include "tests/data/file_size_limit.h"
#include "tests/data/scratch.h"

namespace tessera::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<uint16_t> counting(int64_t count) {
  std::vector<uint16_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<uint16_t>(i * 7919));
  return tokens;
}

TEST(TokenFileWriter, WritesTheBytesOfLlmC) {
  const Scratch scratch;
  TokenFileWriter writer(scratch.path("a.bin"));
  writer.append(258);
  writer.finish();
  std::string expected(1026, '\0');
  expected.replace(0, 12, std::string("\x88\xd8\x34\x01\x01\0\0\0\x01\0\0\0", 12));
  expected.replace(1024, 2, "\x02\x01");
  EXPECT_EQ(scratch.read("a.bin"), expected);
}

// Sizes around the buffer of 2^19 tokens, in parts that do not divide it.
TEST(TokenFileWriter, RoundTripsSizesAroundItsBuffer) {
  const Scratch scratch;
  for (const int64_t size :
       {int64_t{1}, int64_t{524287}, int64_t{524288}, int64_t{524289}, int64_t{1200007}}) {
    const std::vector<uint16_t> tokens = counting(size);
    TokenFileWriter writer(scratch.path("a.bin"));
    for (int64_t begin = 0; begin < size; begin += 99991) {
      writer.append(tokens.data() + begin, std::min<int64_t>(99991, size - begin));
    }
    EXPECT_EQ(writer.size(), size);
    writer.finish();
    const TokenFile file(scratch.path("a.bin"));
    EXPECT_EQ(std::vector<uint16_t>(file.data(), file.data() + file.size()), tokens);
  }
  EXPECT_THAT(scratch.names(), ElementsAre("a.bin"));
}

TEST(TokenFileWriter, KeepsTheFormerFileUntilItFinishes) {
  const Scratch scratch;
  scratch.write("a.bin", "former");
  {
    TokenFileWriter writer(scratch.path("a.bin"));
    writer.append(1);
    EXPECT_EQ(scratch.read("a.bin"), "former");
  }
  EXPECT_EQ(scratch.read("a.bin"), "former");
  EXPECT_THAT(scratch.names(), ElementsAre("a.bin"));
}

TEST(TokenFileWriter, ReportsAFailedWriteAndRemovesItsFile) {
  const Scratch scratch;
  const std::vector<uint16_t> tokens = counting(int64_t{1} << 20);
  TokenFileWriter writer(scratch.path("a.bin"));
  std::string message;
  {
    const FileSizeLimit limit(100000);
    message = config_error([&] { writer.append(tokens.data(), int64_t{1} << 20); });
  }
  EXPECT_THAT(message, AllOf(HasSubstr("write"), HasSubstr("a.bin"), HasSubstr("File too large")));
  EXPECT_THAT(scratch.names(), IsEmpty());  // at once, not when the writer goes
}

// The buffer hides a full disk until the end: finish() must find it.
TEST(TokenFileWriter, ReportsAWriteThatFailsInFinish) {
  const Scratch scratch;
  scratch.write("a.bin", "former");
  TokenFileWriter writer(scratch.path("a.bin"));
  for (uint16_t i = 0; i < 1000; ++i) writer.append(i);
  std::string message;
  {
    const FileSizeLimit limit(1500);
    message = config_error([&] { writer.finish(); });
  }
  EXPECT_THAT(message, HasSubstr("File too large"));
  EXPECT_THAT(scratch.names(), ElementsAre("a.bin"));
  EXPECT_EQ(scratch.read("a.bin"), "former");
}

TEST(TokenFileWriter, ReportsAFolderInItsPlace) {
  const Scratch scratch;
  scratch.write("a.bin/inside", "x");
  TokenFileWriter writer(scratch.path("a.bin"));
  writer.append(1);
  EXPECT_THAT(config_error([&] { writer.finish(); }), HasSubstr("rename"));
  EXPECT_THAT(scratch.names(), ElementsAre("a.bin"));
}

TEST(TokenFileWriter, RefusesAMissingFolderAndAFileWithoutTokens) {
  const Scratch scratch;
  EXPECT_THAT(config_error([&] { TokenFileWriter writer(scratch.path("none/a.bin")); }),
              HasSubstr("No such file"));
  TokenFileWriter writer(scratch.path("a.bin"));
  EXPECT_THAT(config_error([&] { writer.finish(); }), HasSubstr("no tokens"));
}

TEST(TokenFileWriter, IsOfNoUseAfterFinish) {
  const Scratch scratch;
  TokenFileWriter writer(scratch.path("a.bin"));
  writer.append(1);
  writer.finish();
  EXPECT_THROW(writer.finish(), InternalError);
}

}  // namespace
}  // namespace tessera::data
