-- Counts the jobs of one partition that wait and those that run.
--
-- KEYS[..]  streams  job streams of the partition
-- ARGV[1]   group    consumer group of the job streams
--
-- Returns {waiting, running}

local waiting, running = 0, 0
for _, stream in ipairs(KEYS) do
  local n_running = count_running(stream, ARGV[1])
  waiting = waiting + redis.call('XLEN', stream) - n_running
  running = running + n_running
end
return {waiting, running}
