-- Requeues a job that its worker will not finish. The next worker that reclaims jobs claims the job at once. The entry
-- keeps its place in the stream. The attempt number rises, so that the old worker can no longer write. A job whose cancel
-- was accepted ends instead. This works also when Redis is full.
--
-- The key of the job's events is not in KEYS: it follows from the key of the hash.
--
-- KEYS[1]  job       hash of the job
-- KEYS[2]  stream    job stream that the job was read from
-- ARGV[1]  attempt   number of the worker's attempt; '': the worker has read the entry and has not claimed the job
-- ARGV[2]  group     consumer group of the job stream
-- ARGV[3]  entry     id of the job's entry
-- ARGV[4]  worker    id of the worker
-- ARGV[5]  crashed   '1': the worker crashed, which counts as in check_crash.lua; '0': it did not
--
-- Returns 'ok'     the job is requeued
--         'ended'  the job was cancelled, and has ended here
--         'lost'   a newer attempt exists, or the job has ended

local job, stream = KEYS[1], KEYS[2]
local attempt, group, entry, worker, crashed = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
if attempt ~= '' then
  local status, newest, last_worker, cancel, at_risk, generated, generated_at_start = unpack(redis.call('HMGET', job,
    'status', 'attempt', 'worker', 'cancel', 'at_risk', 'generated', 'generated_at_start'))
  if not is_open(status) or not is_newest_attempt(newest, last_worker, attempt, worker) then
    if not crashed then
      remove_death(job, attempt, worker)
    end
    return 'lost'
  end
  if cancel and pcall(end_cancelled, job, stream, group, entry) then
    return 'ended'
  end
  allow_writes_when_full(job) -- another worker ends the job, and that frees memory
  if crashed and at_risk then
    record_crash(job, attempt, worker, is_unproven(generated, generated_at_start))
  end
  requeue_job(job)
end
requeue_entry(stream, group, entry)
return 'ok'
