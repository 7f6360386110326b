// Goal: a token file is read exactly or refused with a message that helps.
// Method: files written byte by byte here, so that an error in the writer cannot hide one in the
// reader.

#include "data/token_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "tests/data/scratch.h"

namespace tessera::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string header_bytes(std::vector<int32_t> words) {
  words.resize(256, 0);
  return std::string(reinterpret_cast<const char*>(words.data()), 1024);
}

std::string file_of(const std::vector<uint16_t>& tokens) {
  return header_bytes({20240520, 1, static_cast<int32_t>(tokens.size())}) + as_bytes(tokens);
}

std::string error_of(const std::string& path, Headerless headerless = Headerless::kRefuse) {
  return config_error([&] { TokenFile file(path, headerless); });
}

std::vector<uint16_t> tokens_of(const TokenFile& file) {
  return std::vector<uint16_t>(file.data(), file.data() + file.size());
}

TEST(TokenFile, ReadsTheFormatOfLlmC) {
  const Scratch scratch;
  const std::vector<uint16_t> tokens = {50256, 0, 1, 65535, 256};
  const TokenFile file(scratch.write("a.bin", file_of(tokens)));
  EXPECT_EQ(tokens_of(file), tokens);
  EXPECT_EQ(file[3], 65535);
  EXPECT_TRUE(file.has_header());
}

TEST(TokenFile, HeaderSplitsTheCountInTwoWords) {
  const TokenHeader small = make_token_header(5);
  EXPECT_EQ(small[0], 20240520);
  EXPECT_EQ(small[1], 1);
  EXPECT_EQ(small[2], 5);
  for (int64_t i = 3; i < kTokenHeaderWords; ++i) EXPECT_EQ(small[i], 0);
  const TokenHeader large = make_token_header((int64_t{3} << 32) + 0xFFFFFFFE);
  EXPECT_EQ(large[2], -2);
  EXPECT_EQ(large[3], 3);
}

TEST(TokenFile, ReadsAFileOfMoreThanFourGibibytes) {
  const Scratch scratch;
  const int64_t count =
      (int64_t{1} << 32) + 3;  // more than 32 bits of tokens, 8.6 GB; sparse, so no disk is used
  const std::string path = scratch.write("a.bin", header_bytes({20240520, 1, 3, 1}));
  ASSERT_EQ(::truncate(path.c_str(), 1024 + 2 * count), 0);
  const int fd = ::open(path.c_str(), O_WRONLY);
  const uint16_t last[2] = {11, 12};
  ASSERT_EQ(::pwrite(fd, last, 4, 1024 + 2 * (count - 2)), 4);
  ::close(fd);
  const TokenFile file(path);
  EXPECT_EQ(file.size(), count);
  EXPECT_EQ(file[0], 0);
  EXPECT_EQ(file[count - 3], 0);
  EXPECT_EQ(file[count - 2], 11);
  EXPECT_EQ(file[count - 1], 12);
}

TEST(TokenFile, ReadsACountBetweenTwoAndFourBillion) {
  const Scratch scratch;
  const int64_t count = (int64_t{1} << 31) + 1;  // the low word is negative as an int32
  const std::string path = scratch.write(
      "a.bin", header_bytes({20240520, 1, static_cast<int32_t>(static_cast<uint32_t>(count))}));
  ASSERT_EQ(::truncate(path.c_str(), 1024 + 2 * count), 0);
  EXPECT_EQ(TokenFile(path).size(), count);
}

TEST(TokenFile, RefusesAMissingFileAFolderAndAPipe) {
  const Scratch scratch;
  EXPECT_THAT(error_of(scratch.path("none.bin")),
              AllOf(HasSubstr("none.bin"), HasSubstr("No such file")));
  EXPECT_THAT(error_of(scratch.folder()), HasSubstr("not a regular file"));
  ASSERT_EQ(::mkfifo(scratch.path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(error_of(scratch.path("pipe")), HasSubstr("not a regular file"));
}

TEST(TokenFile, RefusesAnEmptyFileAndOneWithoutTokens) {
  const Scratch scratch;
  EXPECT_THAT(error_of(scratch.write("a.bin", "")), HasSubstr("empty"));
  EXPECT_THAT(error_of(scratch.write("b.bin", file_of({}))), HasSubstr("holds 0 tokens"));
}

TEST(TokenFile, RefusesASizeThatIsNotWhatTheHeaderSays) {
  const Scratch scratch;
  const std::string whole = file_of({1, 2, 3});  // 1030 bytes
  for (const std::string& bytes : {whole.substr(0, 1028), whole.substr(0, 1029), whole + "x"}) {
    EXPECT_THAT(error_of(scratch.write("a.bin", bytes)),
                AllOf(HasSubstr("a.bin"), HasSubstr("3 tokens"), HasSubstr("1030 bytes"),
                      HasSubstr("found " + std::to_string(bytes.size())),
                      HasSubstr("Re-run tessera prepare")));
  }
}

TEST(TokenFile, RefusesEveryTruncationOfAFileInBothModes) {
  const Scratch scratch;
  const std::string whole = file_of({7, 8, 9});
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::string path = scratch.write("a.bin", whole.substr(0, size));
    EXPECT_NE(error_of(path), "") << size;
    // Of a magic number cut to two bytes nobody can say that it is not a token.
    if (size == 2) continue;
    EXPECT_NE(error_of(path, Headerless::kAllow), "") << size;
  }
}

TEST(TokenFile, RefusesAnotherVersionAndAnAbsurdCount) {
  const Scratch scratch;
  const std::string version_2 = header_bytes({20240520, 2, 1}) + as_bytes({1});
  EXPECT_THAT(error_of(scratch.write("a.bin", version_2)), HasSubstr("version 2"));
  const std::string negative = header_bytes({20240520, 1, 1, -1}) + as_bytes({1});
  EXPECT_THAT(error_of(scratch.write("b.bin", negative)), HasSubstr("tokens"));
  const std::string huge = header_bytes({20240520, 1, 1, 0x7FFFFFFF}) + as_bytes({1});
  EXPECT_THAT(error_of(scratch.write("c.bin", huge)), HasSubstr("tokens"));
}

TEST(TokenFile, ReadsHeaderlessTokensOnlyWhenAllowed) {
  const Scratch scratch;
  const std::vector<uint16_t> tokens = {5, 6, 7};
  const std::string path = scratch.write("a.bin", as_bytes(tokens));
  EXPECT_THAT(error_of(path), AllOf(HasSubstr("magic number 20240520"), HasSubstr("headerless")));
  const TokenFile file(path, Headerless::kAllow);
  EXPECT_EQ(tokens_of(file), tokens);
  EXPECT_FALSE(file.has_header());
  EXPECT_EQ(TokenFile(scratch.write("b.bin", as_bytes({9})), Headerless::kAllow).size(), 1);
  const std::vector<uint16_t> longer(3000, 17);
  EXPECT_EQ(tokens_of(TokenFile(scratch.write("c.bin", as_bytes(longer)), Headerless::kAllow)),
            longer);
}

TEST(TokenFile, NeverTakesADamagedHeaderForTokens) {
  const Scratch scratch;
  const std::string tokens = as_bytes({1, 2, 3});
  const auto error = [&](const std::string& bytes) {
    return error_of(scratch.write("a.bin", bytes), Headerless::kAllow);
  };
  EXPECT_THAT(error(header_bytes({}) + tokens), HasSubstr("damaged header"));
  EXPECT_THAT(error(header_bytes({0, 1, 3}) + tokens), HasSubstr("damaged header"));
  EXPECT_THAT(error(header_bytes({20240521, 1, 3}) + tokens), HasSubstr("damaged header"));
  EXPECT_THAT(error(std::string(6, '\0')), HasSubstr("damaged header"));
  EXPECT_THAT(error(header_bytes({20240520, 1, 4}) + tokens), HasSubstr("1032 bytes"));
  EXPECT_THAT(error(header_bytes({20240801, 7, 3}) + tokens), HasSubstr("Llama-3"));
  EXPECT_THAT(error("BIN.TOK\n" + tokens), HasSubstr("llmq"));
  EXPECT_THAT(error(std::string("\x01\x34\xd8\x88", 4) + tokens), HasSubstr("big-endian"));
  EXPECT_THAT(error(tokens + "x"), HasSubstr("odd size (7 bytes)"));
}

TEST(TokenFile, MovesWithoutMovingTheTokens) {
  const Scratch scratch;
  TokenFile first(scratch.write("a.bin", file_of({1, 2})));
  const uint16_t* data = first.data();
  TokenFile second(std::move(first));
  EXPECT_EQ(second.data(), data);
  TokenFile third(scratch.write("b.bin", file_of({3})));
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(third[1], 2);
  EXPECT_EQ(third.path(), scratch.path("a.bin"));
}

TEST(TokenFile, HintsDoNotChangeTheTokens) {
  const Scratch scratch;
  const std::vector<uint16_t> tokens(10007, 3);
  const TokenFile file(scratch.write("a.bin", file_of(tokens)));
  file.expect_random_access();
  file.will_need(0, 10007);
  file.will_need(9000, 1007);
  file.expect_sequential_access();
  EXPECT_EQ(tokens_of(file), tokens);
}

}  // namespace
}  // namespace tessera::data
