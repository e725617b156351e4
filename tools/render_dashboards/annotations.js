// Annotations of a dashboard: dashed lines where something began and ended, and a tint between them.
import { ask, filled, stepOf } from './frames.js';

export async function marksOf(annotations, from, to) {
  const marks = [];
  const step = stepOf(from, to);
  for (const { enable, expr, iconColor } of annotations.filter((one) => one.enable)) {
    for (const { values } of await ask('query_range', { query: filled(expr), start: from, end: to, step })) {
      let begin = values[0][0];
      values.forEach(([time], place) => {
        const next = values[place + 1]?.[0];
        if (next === undefined || next - time > 1.5 * step) {
          marks.push({ color: iconColor, from: begin * 1000, to: time * 1000 });
          begin = next;
        }
      });
    }
  }
  return marks;
}

// Adds the marks to a plot that is about to be made.
export function withMarks(config, marks, theme) {
  if (config.marked) return true;
  config.marked = true;
  config.addHook('draw', (u) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const mark of marks) {
      const color = theme.visualization.getColorByName(mark.color);
      const [begin, end] = [mark.from, mark.to].map((time) => Math.round(u.valToPos(time, 'x', true)));
      ctx.fillStyle = ctx.strokeStyle = color;
      ctx.globalAlpha = 0.08;
      ctx.fillRect(begin, bbox.top, end - begin, bbox.height);
      ctx.globalAlpha = 1;
      ctx.lineWidth = 1.5;
      ctx.setLineDash([4, 4]);
      for (const x of new Set([begin, end])) {
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
    ctx.restore();
  });
  return true;
}
